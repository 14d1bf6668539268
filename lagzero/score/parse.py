"""A recursive-descent parser from tokens to nodes. It knows arithmetic and no names to call."""

from __future__ import annotations

from lagzero.score.cursor import (
    CLOSERS,
    END,
    GREEK,
    HALVES,
    NOT_FACTORS,
    RELATIONS,
    SEPARATORS,
    SET_OPS,
    Cursor,
    number_of,
    proper_fraction,
    repeating,
)
from lagzero.score.nodes import (
    Add,
    Based,
    Degree,
    Dots,
    Func,
    Listing,
    Matrix,
    Mul,
    Node,
    Num,
    Percent,
    PlusMinus,
    Pow,
    Ratio,
    Relation,
    SetOf,
    Sym,
    UnreadableError,
    Words,
    depth,
    negative,
    number,
    product,
    quotient,
)
from lagzero.score.tokens import FUNCTIONS, Token

MAX_DEPTH = 40  # of brackets and exponents
MAX_TREE = 150


def parse(tokens: list[Token]) -> Node:
    """Return the tree of a whole answer. Raises UnreadableError."""
    parser = _Parser(tokens)
    node = parser.listing()
    if parser.peek is not END:
        raise UnreadableError(f"left over: {parser.peek.text!r}")
    if depth(node) > MAX_TREE:
        raise UnreadableError("nested too deeply")
    return node


class _Parser(Cursor):
    def __init__(self, tokens: list[Token]):
        super().__init__(tokens)
        self.depth = 0
        self.open_bars = 0

    # Listings, relations, sets.

    def listing(self) -> Node:
        items, joiner = [self.relation()], ","
        while self.peek.kind == "op" and self.peek.text in SEPARATORS:
            while self.peek.kind == "op" and self.peek.text in SEPARATORS:
                word = self.next().text
                joiner = word if word in ("and", "or") else joiner
            if self.peek is END:
                break
            items.append(self.relation())
        return items[0] if len(items) == 1 else Listing("", "", tuple(items), joiner)

    def relation(self) -> Node:
        words: list[str] = []
        while self.peek.kind == "word":
            words.append(self.next().text)
        if words:
            return Words(" ".join(words))
        members, ops = [self.sets()], list[str]()
        while True:
            if self.peek.kind == "op" and self.peek.text in RELATIONS:
                ops.append(RELATIONS[self.next().text])
            elif self.take(r"\in"):
                ops.append("in")
            else:
                break
            # "x = 1, 2" is a listing whose first item is a relation, so one member is read here.
            members.append(self.sets())
        if ops:
            return Relation(tuple(ops), tuple(members))
        if self.peek.text != ":":
            return members[0]
        parts = [self.scalar(members[0])]
        while self.take(":"):
            parts.append(self.scalar(self.sum()))
        return Ratio(tuple(parts))

    def sets(self) -> Node:
        node = self.sum()
        while self.peek.text in SET_OPS:
            node = SetOf(SET_OPS[self.next().text], (node, self.sum()))
        return node

    # Arithmetic.

    def sum(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise UnreadableError("nested too deeply")
        terms = [self.signed()]
        while self.peek.text in ("+", "-", r"\pm", r"\mp"):
            terms.append(self.signed())
        self.depth -= 1
        return terms[0] if len(terms) == 1 else Add(tuple(map(self.scalar, terms)))

    def signed(self) -> Node:
        minus, both = False, ""
        while self.peek.text in ("+", "-", r"\pm", r"\mp"):
            sign = self.next().text
            minus ^= sign == "-"
            both = sign if sign.startswith("\\") else both
        node = self.product()
        if minus:
            node = negative(self.scalar(node))
        return PlusMinus(1 if both == r"\pm" else -1, self.scalar(node)) if both else node

    def product(self) -> Node:
        factors = [self.power()]
        while True:
            if self.take("*"):
                factors.append(self.operand())
            elif self.take("/"):
                bottom = self.scalar(self.operand())
                folds = isinstance(bottom, Num) and bottom.value != 0
                factors.append(quotient(number(1), bottom) if folds else Pow(bottom, number(-1)))
            elif self.starts_factor():
                factors.append(self.power())
            else:
                break
        return factors[0] if len(factors) == 1 else product(list(map(self.scalar, factors)))

    def operand(self) -> Node:
        if self.take("-"):
            return negative(self.scalar(self.operand()))
        self.take("+")
        return self.power()

    def starts_factor(self) -> bool:
        kind, text = self.peek
        if kind in ("num", "repeating"):
            if self.tokens[self.at - 1].kind in ("num", "repeating"):
                raise UnreadableError("two numbers side by side")
            return True
        if kind == "cmd":
            closes = {closer for closer, _ in HALVES.values()}
            return text not in NOT_FACTORS and text not in closes
        if kind == "op":
            return text in ("(", "[", "{") or (text == "|" and not self.open_bars)
        return kind in ("sym", "begin")

    def power(self) -> Node:
        node = self.postfix(self.primary())
        if not self.take("^"):
            return node
        self.scalar(node)
        braced = self.take("{")
        if self.take(r"\circ"):
            if braced:
                self.expect("}")
            return self.postfix(Degree(node))
        if braced:
            self.at -= 1
        exponent = self.exponent()
        return self.postfix(Pow(node, exponent))

    def exponent(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise UnreadableError("nested too deeply")
        if self.take("-"):
            node = negative(self.scalar(self.exponent()))
        elif self.peek.text == "{":
            node = self.postfix(self.scalar(self.group()))
            if self.take("^"):
                node = Pow(node, self.exponent())
        else:
            node = self.scalar(self.power())
        self.depth -= 1
        return node

    def postfix(self, node: Node) -> Node:
        while True:
            if self.take("!"):
                node = Func("factorial", (self.scalar(node),))
            elif self.take("%"):
                node = Percent(self.scalar(node))
            else:
                return node

    # The smallest parts.

    def primary(self) -> Node:
        kind, text = self.next()
        match kind:
            case "num":
                return self.mixed(Num(number_of(text)), "." not in text)
            case "repeating":
                return Num(repeating(text))
            case "based":
                digits, _, base = text.partition("_")
                return Based(digits.lstrip("0") or "0", int(base.strip("{()}")))
            case "sym":
                return self.symbol(text)
            case "begin":
                return self.matrix(text)
            case "cmd":
                return self.command(text)
            case "op" if text in ("(", "["):
                return self.bracket(text)
            case "op" if text == "{":
                self.at -= 1
                return self.group()
            case "op" if text == "|":
                self.open_bars += 1
                node = self.scalar(self.sum())
                self.expect("|")
                self.open_bars -= 1
                return Func("abs", (node,))
            case "op" if text == "...":
                return Dots()
            case _:
                raise UnreadableError(f"unexpected {text!r}")

    def mixed(self, whole: Num, integer: bool) -> Node:
        r"""Read ``4 3/5`` and ``4\frac{3}{5}`` as a sum: a proper fraction of plain digits."""
        if not integer:
            return whole
        part: Num | None = None
        ahead = self.tokens[self.at : self.at + 3]
        if self.peek.text == r"\frac":
            start, tokens = self.at, list(self.tokens)
            self.next()
            part = proper_fraction(self.fraction_argument(), self.fraction_argument())
            if part is None:
                # A short fraction splits a token in two, so the tokens go back as well.
                self.at, self.tokens = start, tokens
        elif [t.kind for t in ahead] == ["num", "op", "num"] and ahead[1].text == "/":
            part = proper_fraction(Num(number_of(ahead[0].text)), Num(number_of(ahead[2].text)))
            self.at += 3 if part is not None else 0
        return whole if part is None else Num(whole.value + part.value)

    def symbol(self, name: str) -> Node:
        while self.take("'"):
            name += "'"
        if self.take("_"):
            if self.take("{"):
                parts: list[str] = []
                while self.peek is not END and self.peek.text != "}":
                    parts.append(self.next().text)
                self.expect("}")
                name += "_" + "".join(parts)
            else:
                name += "_" + self.next().text
        return Sym(name)

    def bracket(self, opening: str) -> Node:
        if self.peek.text in CLOSERS[opening] and self.peek.kind != "end of text":
            return Listing(opening, self.next().text, ())
        bars, self.open_bars = self.open_bars, 0
        node = self.listing()
        self.open_bars = bars
        closing = self.next()
        if closing.kind not in ("op", "cmd") or closing.text not in (
            (r"\}",) if opening == r"\{" else tuple(CLOSERS[opening])
        ):
            raise UnreadableError(f"{opening} is closed by {closing.text!r}")
        if opening in (r"\{", "{"):
            items = node.items if isinstance(node, Listing) and not node.opening else (node,)
            return Listing("{", "}", items)
        if isinstance(node, Listing) and not node.opening:
            return Listing(opening, closing.text, node.items, node.joiner)
        if opening + closing.text in ("()", "[]"):
            return node
        raise UnreadableError(f"one item in {opening}{closing.text}")

    def group(self) -> Node:
        """Read ``{...}``: a LaTeX group, or a set where it holds a comma."""
        self.expect("{")
        bars, self.open_bars = self.open_bars, 0
        node = self.listing()
        self.open_bars = bars
        self.expect("}")
        if isinstance(node, Listing) and not node.opening:
            return Listing("{", "}", node.items)
        return node

    def argument(self) -> Node:
        node = self.group() if self.peek.text == "{" else self.primary()
        return self.scalar(node)

    def fraction_argument(self) -> Node:
        token = self.peek
        if token.kind == "num":
            # Without braces LaTeX takes one digit.
            self.next()
            if len(token.text) > 1:
                self.tokens.insert(self.at, Token("num", token.text[1:]))
            return Num(number_of(token.text[0]))
        return self.argument()

    def command(self, name: str) -> Node:
        if name[1:] in FUNCTIONS:
            return self.function(name[1:])
        match name:
            case r"\frac":
                return quotient(self.fraction_argument(), self.fraction_argument())
            case r"\binom":
                return Func("binom", (self.argument(), self.argument()))
            case r"\sqrt":
                degree: Node = number(2)
                if self.take("["):
                    degree = self.scalar(self.sum())
                    self.expect("]")
                return Pow(self.argument(), quotient(number(1), degree))
            case r"\pi":
                return Sym("pi")
            case r"\infty":
                return Sym("oo")
            case r"\emptyset":
                return Listing("{", "}", ())
            case r"\{":
                if self.take(r"\}"):
                    return Listing("{", "}", ())
                return self.bracket(name)
            case _ if name in HALVES:
                closing, function = HALVES[name]
                node = self.scalar(self.sum())
                self.expect(closing)
                return Func(function, (node,))
            case _ if name in GREEK:
                return self.symbol(name[1:])
            case _:
                raise UnreadableError(f"unknown command {name}")

    def function(self, name: str) -> Node:
        base: Node | None = None
        exponent: Node | None = None
        for _ in range(2):
            if name in ("log", "lg") and self.take("_"):
                base = self.argument()
            elif self.take("^"):
                exponent = self.exponent()
        if self.peek.text in ("(", "{", "["):
            inside = self.argument()
        else:
            inside = self.scalar(self.operand())
            while self.starts_factor() and self.peek.text[1:] not in FUNCTIONS:
                inside = Mul((inside, self.scalar(self.power())))
        if exponent == number(-1) and name in ("sin", "cos", "tan"):
            return Func("arc" + name, (inside,))
        if name in ("log", "lg") and base is not None:
            node = quotient(Func("ln", (inside,)), Func("ln", (base,)))
        else:
            node = Func(name, (inside,))
        return node if exponent is None else Pow(node, exponent)

    def matrix(self, begin: str) -> Node:
        name = begin[len(r"\begin{") :].partition("}")[0].rstrip("*")
        if name not in (
            "matrix",
            "pmatrix",
            "bmatrix",
            "Bmatrix",
            "vmatrix",
            "array",
            "smallmatrix",
        ):
            raise UnreadableError(f"environment {name}")
        rows: list[tuple[Node, ...]] = []
        while self.peek.kind != "end":
            cells = [self.scalar(self.sum())]
            while self.take("&", r"\&"):
                cells.append(self.scalar(self.sum()))
            rows.append(tuple(cells))
            if not self.take(r"\\") and self.peek.kind != "end":
                raise UnreadableError(f"in a matrix: {self.peek.text!r}")
        self.next()
        if len({len(row) for row in rows}) != 1:
            raise UnreadableError("a matrix with rows of several lengths")
        return Matrix("determinant" if name == "vmatrix" else "matrix", tuple(rows))
