"""Whether an answer says what the gold answer says. Rules of form here; values by ``equal``.

The rules are written out for users in ``docs/rewards.md``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from lagzero.score.choice import choice_gold, choice_letter
from lagzero.score.extract import unwrap
from lagzero.score.intervals import Equal, pieces, same_set, speaks_of_sets
from lagzero.score.nodes import (
    SCALARS,
    Add,
    Based,
    Dots,
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
    Sym,
    negative,
    number,
    rebuild,
    symbols,
    walk,
)
from lagzero.score.read import Reading, plain_form, readings, unit_factor, with_letter_unit

MAX_ITEMS = 200
_WORD = re.compile(r"[A-Za-z]{3,}")  # of two letters: a product
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}")


class UndecidedError(Exception):
    """``equal`` could not tell; a slower one may."""


def same_answer(gold: str, answer: str, equal: Equal) -> bool:
    """Return whether two answers agree. ``equal`` tells whether two scalar nodes have one value.

    Raises UndecidedError where ``equal`` did and no other reading agrees.
    """
    gold, answer = unwrap(gold), unwrap(answer)
    if not plain_form(gold) or not plain_form(answer):
        return False
    if plain_form(gold) == plain_form(answer):
        return True
    word, other = _plain_word(gold), _plain_word(answer)
    if word and other:
        return word == other
    letter = choice_gold(gold)
    if letter is not None:
        return choice_letter(answer) == letter
    undecided = False
    for one in readings(gold):
        for other in readings(answer):
            try:
                if _same_reading(one, other, equal):
                    return True
            except UndecidedError:
                undecided = True
    if undecided:
        raise UndecidedError
    return False


def _plain_word(text: str) -> str:
    """Return the one word that a text is, in lower case, or ""."""
    text = _TEXT.sub(r"\1", text).strip(" .$*")
    return text.lower() if _WORD.fullmatch(text) else ""


def _same_reading(gold: Reading, answer: Reading, equal: Equal) -> bool:
    if gold.remark != answer.remark:
        return False
    gold, answer = with_letter_unit(gold, answer), with_letter_unit(answer, gold)
    factor = unit_factor(gold.unit, answer.unit)
    if factor is None:
        return False
    node = answer.node if factor == 1 else Mul((Num(factor), answer.node))
    if factor != 1 and not isinstance(answer.node, SCALARS):
        return False
    return same(gold.node, node, equal)


def same(gold: Node, answer: Node, equal: Equal) -> bool:
    """Return whether two trees say the same."""
    gold, answer = settle(gold), settle(answer)
    if gold == answer:
        return True
    if isinstance(gold, Relation) or isinstance(answer, Relation):
        return _same_relation(gold, answer, equal)
    if speaks_of_sets(gold) or speaks_of_sets(answer):
        return _same_set(gold, answer, equal)
    if isinstance(gold, Listing) or isinstance(answer, Listing):
        return _same_listing(_as_listing(gold), _as_listing(answer), equal)
    match gold, answer:
        case Matrix(), Matrix():
            shapes = [[len(row) for row in matrix.rows] for matrix in (gold, answer)]
            if gold.kind != answer.kind or shapes[0] != shapes[1]:
                return False
            cells = zip(_cells(gold), _cells(answer), strict=True)
            return all(same(a, b, equal) for a, b in cells)
        case Ratio(), Ratio():
            return _in_order(gold.items, answer.items, equal)
        case _ if isinstance(gold, SCALARS) and isinstance(answer, SCALARS):
            return _same_scalar(gold, answer, equal)
        case _:
            return False


def settle(node: Node) -> Node:
    """Return the node in its settled form: both signs written out, a name given to a listing."""
    if isinstance(node, Listing) and node.opening == "" and node.items:
        return _settled_listing(node)
    if isinstance(node, Relation):
        return _settled_relation(node)
    variants = _variants(node)
    return node if len(variants) == 1 else Listing("", "", variants, "or")


def _settled_listing(node: Listing) -> Node:
    first, *rest = node.items
    named = _assignment(first) if isinstance(first, Relation) else None
    items: list[Node] = []
    if named and len(named[1]) == 1 and not any(isinstance(item, Relation) for item in rest):
        # "n = 3, 5, 7" gives one name to all.
        values = settle(Listing("", "", (named[1][0], *rest), node.joiner))
        return Relation(("=",), (named[0], values))
    pairs = [_assignment(item) for item in node.items if isinstance(item, Relation)]
    named_alike = (
        [pair for pair in pairs if pair and len(pair[1]) == 1 and pair[0] == pairs[0][0]]
        if pairs and pairs[0]
        else []
    )
    if len(named_alike) == len(node.items) and node.joiner != "and":
        values = settle(Listing("", "", tuple(pair[1][0] for pair in named_alike), node.joiner))
        return Relation(("=",), (named_alike[0][0], values))
    for item in node.items:
        settled = settle(item)
        bare = isinstance(settled, Listing) and not settled.opening
        items.extend(settled.items if bare and isinstance(settled, Listing) else (settled,))
    return Listing("", "", tuple(items), node.joiner)


def _settled_relation(node: Relation) -> Node:
    if "~" in node.ops:
        # "1/3 ~ 0.33" states 1/3; "x ~ 0.33" names 0.33.
        at = node.ops.index("~")
        if at == 0 and not is_name(node.members[0]):
            return settle(node.members[0])
        if at > 0:
            node = Relation(node.ops[:at], node.members[: at + 1])
        else:
            node = Relation(("=", *node.ops[1:]), node.members)
    if node.ops == ("=",) and is_name(node.members[1]) and not is_name(node.members[0]):
        node = Relation(node.ops, node.members[::-1])
    named = _assignment(node)
    if named and len(named[1]) == 1:
        return Relation(("=",), (named[0], settle(named[1][0])))
    variants = _variants(node)
    return node if len(variants) == 1 else Listing("", "", variants, "or")


def _variants(node: Node) -> tuple[Node, ...]:
    if not any(isinstance(part, PlusMinus) for part in walk(node)):
        return (node,)

    def signed(part: Node, sign: int) -> Node:
        if isinstance(part, PlusMinus):
            inside = signed(part.of, sign)
            return inside if part.sign == sign else negative(inside)
        return rebuild(part, lambda child: signed(child, sign))

    return (signed(node, 1), signed(node, -1))


def is_name(node: Node) -> bool:
    """Return whether a node is what an answer may give a name with: x, f(x), (x, y), AB."""
    match node:
        case Sym():
            return node.name not in ("pi", "e", "i", "oo", "R")
        case Mul():
            head, *rest = node.args
            if not isinstance(head, Sym) or not all(isinstance(part, Sym) for part in rest):
                return False
            letters = [part.name for part in node.args if isinstance(part, Sym)]
            called = len(letters) == 2 and head.name.rstrip("'") in set("fghFGHPQpqT")
            return called or all(letter.isupper() for letter in letters)
        case Listing():
            return bool(node.items) and node.opening == "(" and all(map(is_name, node.items))
        case _:
            return False


def _assignment(node: Relation) -> tuple[Node, tuple[Node, ...]] | None:
    if is_name(node.members[0]) and (node.ops == ("in",) or set(node.ops) == {"="}):
        return node.members[0], node.members[1:]
    return None


def _same_relation(gold: Node, answer: Node, equal: Equal) -> bool:
    if not isinstance(gold, Relation):
        return isinstance(answer, Relation) and _states(answer, gold, equal)
    named = _assignment(gold)
    if named and len(named[1]) == 1:
        name, (value,) = named
        if not isinstance(answer, Relation):
            return same(value, answer, equal)
        other = _assignment(answer)
        if other and other[0] == name and answer.ops != ("in",):
            return all(same(value, stated, equal) for stated in other[1])
        if other and other[0] == name:
            return same(value, other[1][0], equal)
        # A name for a constant must be given as that: the problem's own equation is no answer.
        if not (isinstance(value, SCALARS) and symbols(value)):
            return (
                speaks_of_sets(answer) and speaks_of_sets(value) and _same_set(value, answer, equal)
            )
    if isinstance(answer, Relation) and gold.ops == answer.ops == ("=",):
        return _proportional(gold, answer, equal, signed=False)
    if speaks_of_sets(gold):
        return _same_set(gold, answer, equal) or _same_inequality(gold, answer, equal)
    return False


def _states(answer: Relation, gold: Node, equal: Equal) -> bool:
    """Return whether a chain of equalities states the value: x = 2 + 3 = 5 states 5."""
    if speaks_of_sets(answer):
        return _same_set(gold, answer, equal)
    named = _assignment(answer)
    if named:
        return all(same(gold, value, equal) for value in named[1])
    if set(answer.ops) != {"="}:
        return False
    return all(same(gold, value, equal) for value in answer.members)


def _same_set(gold: Node, answer: Node, equal: Equal) -> bool:
    first, second = pieces(gold), pieces(answer)
    if first is None or second is None:
        if isinstance(gold, Listing) and isinstance(answer, Listing):
            return _same_listing(gold, answer, equal)
        return False
    both_named = isinstance(gold, Relation) and isinstance(answer, Relation)
    if both_named and symbols(gold) != symbols(answer):
        return False
    return same_set(first, second, equal)


def _same_inequality(gold: Relation, answer: Node, equal: Equal) -> bool:
    if not isinstance(answer, Relation) or not len(gold.ops) == len(answer.ops) == 1:
        return False
    one, other = _below(gold), _below(answer)
    return one.ops == other.ops and _proportional(one, other, equal, signed=True)


def _below(node: Relation) -> Relation:
    if node.ops[0] in (">", ">="):
        return Relation(("<" if node.ops[0] == ">" else "<=",), node.members[::-1])
    return node


def _proportional(gold: Relation, answer: Relation, equal: Equal, *, signed: bool) -> bool:
    """Return whether left minus right of both differ by a constant factor other than 0."""
    sides = (*gold.members, *answer.members)
    if not all(isinstance(side, SCALARS) for side in sides):
        return False
    first, second = _difference(gold), _difference(answer)
    if symbols(first) != symbols(second) or not symbols(first):
        return False
    at_first, at_second = _at_a_point(first), _at_a_point(second)
    if equal(at_first, number(0)) or equal(at_second, number(0)):
        return False
    factor = Mul((at_first, Pow(at_second, number(-1))))
    if signed and not equal(Pow(Pow(factor, number(2)), Num(Fraction(1, 2))), factor):
        return False
    return equal(first, Mul((factor, second)))


def _difference(node: Relation) -> Node:
    left, right = node.members
    return Add((left, negative(right)))


def _at_a_point(node: Node) -> Node:
    # Any point where neither side vanishes will do; these are not roots of what people ask.
    places = {
        name: Num(Fraction(7919 + 104 * at, 1009)) for at, name in enumerate(sorted(symbols(node)))
    }

    def put(part: Node) -> Node:
        if isinstance(part, Sym):
            return places.get(part.name, part)
        return rebuild(part, put)

    return put(node)


def _as_listing(node: Node) -> Listing:
    return node if isinstance(node, Listing) else Listing("", "", (node,))


def _same_listing(gold: Listing, answer: Listing, equal: Equal) -> bool:
    if max(len(gold.items), len(answer.items)) > MAX_ITEMS:
        return False
    gold_brackets, brackets = gold.opening + gold.closing, answer.opening + answer.closing
    if "{}" == gold_brackets == brackets:
        return _covers(gold.items, answer.items, equal) and _covers(answer.items, gold.items, equal)
    if len(gold.items) != len(answer.items):
        return False
    if gold_brackets and brackets and gold_brackets != brackets:
        return False
    if gold_brackets == "[]" and not brackets and len(gold.items) == 2:
        return False  # an interval whose brackets were left out
    dots = any(isinstance(item, Dots) for item in gold.items)
    if dots or {gold_brackets, brackets} - {"", "{}"}:
        return _in_order(gold.items, answer.items, equal)
    return _in_any_order(gold.items, answer.items, equal)


def _in_order(gold: Sequence[Node], answer: Sequence[Node], equal: Equal) -> bool:
    if len(gold) != len(answer):
        return False
    return all(same(a, b, equal) for a, b in zip(gold, answer, strict=True))


def _in_any_order(gold: Sequence[Node], answer: Sequence[Node], equal: Equal) -> bool:
    left = list(answer)
    for item in gold:
        at = next((at for at, other in enumerate(left) if same(item, other, equal)), None)
        if at is None:
            return False
        left.pop(at)
    return True


def _covers(these: Sequence[Node], those: Sequence[Node], equal: Equal) -> bool:
    return all(any(same(item, other, equal) for other in these) for item in those)


def _cells(matrix: Matrix) -> list[Node]:
    return [cell for row in matrix.rows for cell in row]


def _same_scalar(gold: Node, answer: Node, equal: Equal) -> bool:
    if isinstance(gold, Based) or isinstance(answer, Based):
        return _same_digits(gold, answer)
    if isinstance(gold, Percent) and isinstance(answer, Percent):
        return equal(gold.of, answer.of)
    if isinstance(gold, Percent) or isinstance(answer, Percent):
        return _same_percentage(gold, answer, equal)
    return equal(gold, answer)


def _same_digits(gold: Node, answer: Node) -> bool:
    """A gold answer in a stated base: the same digits, the base named or left out."""
    if not isinstance(gold, Based) or isinstance(answer, Based):
        return gold == answer
    if not isinstance(answer, Num) or answer.value.denominator != 1:
        return False
    digits = gold.digits
    return digits.isdecimal() and len(digits) < 2000 and answer.value == int(digits)


def _same_percentage(gold: Node, answer: Node, equal: Equal) -> bool:
    """37 % is 37/100. A bare number above 1 may also stand for that many per cent."""
    if equal(gold, answer):
        return True
    named, bare = (gold, answer) if isinstance(gold, Percent) else (answer, gold)
    above = isinstance(bare, Num) and bare.value > 1
    return above and isinstance(named, Percent) and equal(named.of, bare)
