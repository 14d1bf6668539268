"""From the text of an answer to tokens: plain text, LaTeX and Unicode become one alphabet."""

# ruff: noqa: RUF001 - the look-alikes are what this file is about

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

from lagzero.score.nodes import UnreadableError, word_set

MAX_CHARS = 20_000
MAX_WRAPPERS = 4


class Token(NamedTuple):
    """``kind`` is num, repeating, based, sym, word, begin, end, cmd or op."""

    kind: str
    text: str


_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_UNICODE = {
    **dict.fromkeys("−–‐‑‒﹣－", "-"),
    **dict.fromkeys("×✕", r"\times "),
    **dict.fromkeys("·⋅∙", r"\cdot "),
    "÷": "/",
    "∕": "/",
    "√": r"\sqrt ",
    "π": r"\pi ",
    "∞": r"\infty ",
    "≤": r"\le ",
    "⩽": r"\le ",
    "≥": r"\ge ",
    "⩾": r"\ge ",
    "≠": r"\ne ",
    "≈": r"\approx ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∖": r"\setminus ",
    "∈": r"\in ",
    "∅": r"\emptyset ",
    "±": r"\pm ",
    "∓": r"\mp ",
    "…": r"\ldots ",
    "⋯": r"\ldots ",
    "°": r"^\circ ",
    "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}",
    "½": r"\frac{1}{2}",
    "⅓": r"\frac{1}{3}",
    "⅔": r"\frac{2}{3}",
    "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}",
    "⅛": r"\frac{1}{8}",
    "’": "'",
    "⟨": r"\langle ",
    "⟩": r"\rangle ",
    "€": "",
    "£": "",
}
_DROPPED = re.compile(
    r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|hfill|quad|qquad|nobreak)"
    r"(?![a-zA-Z])|(?<!\\)\\[,;:!\s()\[\]$]|[$~]|\\hspace\{[^{}]*\}"
)
_WRAPPED = re.compile(r"^\s*(\*\*|__|`)(.+)\1\s*$", re.DOTALL)
_TIMES_X = re.compile(r"(?<![A-Za-z])(\d)\s*[xX]\s*(?=10\s*\^)")
_HALF_DAY = re.compile(r"\b([ap])\.\s?m\b\.?", re.IGNORECASE)
_GROUP_EXPLICIT = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\,|\\ )(?=\d{3}(?!\d))")
_GROUP_SPACE = re.compile(r"(?<![\d.,^_])\d{1,3}(?: \d{3})+(?![\d/])")
_GROUP_COMMA = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,]|\.\d*,)")

_LEX = re.compile(
    r"""
    (?P<space>\s+)
  | (?P<begin>\\begin\{\w+\*?\}(?:\{[lcr|\s]*\})?) | (?P<end>\\end\{\w+\*?\})
  | \\(?:text|textbf|textit|textrm|textsf|mathrm|mathsf|mbox|operatorname|textnormal)\s*
      \{(?P<text>[^{}]*)\}
  | \\(?:mathbf|mathit|boldsymbol|mathcal|bm|vec|hat)\s*\{?\s*(?P<bold>[a-zA-Z])\s*\}?
  | \\mathbb\s*\{?\s*(?P<domain>[A-Z])\s*\}?
  | (?P<repeating>\d*\.\d*\\(?:overline|bar|dot)\{\d+\})
  | (?P<based>(?<![A-Za-z\d.])\d[\dA-F]*_(?:\{\(?\d+\)?\}|\d+))
  | (?P<science>(?:\d+\.\d+[eE][+-]?\d+|\d+E[+-]?\d+|\d+e\d+|\d+e[+-]\d\d+)(?![\w.]))
  | (?P<num>\d+(?:\.\d+)?|\.\d+)
  | (?P<cmd>\\[a-zA-Z]+|\\[{}%&\#_|\\])
  | (?P<letters>[A-Za-z]+)
  | (?P<op><=|>=|!=|==|\.\.\.|[-+*/^_=<>(){}\[\]|,;:!%&'.])
    """,
    re.VERBOSE,
)

_ALIAS = {
    **dict.fromkeys([r"\dfrac", r"\tfrac", r"\cfrac"], r"\frac"),
    **dict.fromkeys([r"\dbinom", r"\tbinom"], r"\binom"),
    **dict.fromkeys([r"\le", r"\leq", r"\leqslant"], "<="),
    **dict.fromkeys([r"\ge", r"\geq", r"\geqslant"], ">="),
    **dict.fromkeys([r"\ne", r"\neq"], "!="),
    **dict.fromkeys([r"\approx", r"\simeq", r"\doteq"], "~"),
    **dict.fromkeys([r"\cdot", r"\times", r"\ast"], "*"),
    **dict.fromkeys([r"\ldots", r"\dots", r"\cdots", r"\dotsc", r"\dotsb"], "..."),
    **dict.fromkeys([r"\lvert", r"\rvert", r"\vert", r"\mid"], "|"),
    **dict.fromkeys([r"\lbrace"], r"\{"),
    **dict.fromkeys([r"\rbrace"], r"\}"),
    **dict.fromkeys([r"\langle", r"\lparen"], "("),
    **dict.fromkeys([r"\rangle", r"\rparen"], ")"),
    **dict.fromkeys([r"\lbrack"], "["),
    **dict.fromkeys([r"\rbrack"], "]"),
    **dict.fromkeys([r"\land", r"\wedge"], "and"),
    **dict.fromkeys([r"\lor", r"\vee"], "or"),
    **dict.fromkeys([r"\backslash"], r"\setminus"),
    **dict.fromkeys([r"\varnothing"], r"\emptyset"),
    r"\colon": ":",
    r"\lt": "<",
    r"\gt": ">",
    r"\div": "/",
    r"\%": "%",
    r"\prime": "'",
    "==": "=",
}
FUNCTIONS = word_set(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg exp abs"
)
_NAMED = FUNCTIONS | {"pi", "sqrt", "infty"}
_PLAIN_NAMES = {"infinity": "infty", "inf": "infty", "oo": "infty", "asin": "arcsin"} | {
    name: name for name in _NAMED
}
SCALES = {
    "dozen": 12,
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
# Runs of two or three letters that are words or units; any other such run is a product of letters.
_SHORT_WORDS = word_set(
    "a am an any all are as at be by can cm cc dm do feet few for ft gal has he hr hrs how hz "
    "if in inch is it its kg kj km kw lb lbs let mg mi min ml mm mod mph ms nm no nor not odd "
    "of off on one our out oz pm sec she six so ten the to too two up usd was we who why won "
    "yd yes yet you day era per"
)


def normalise(text: str) -> str:
    """Return the text in one alphabet: no math delimiters, spacing commands or emphasis."""
    if len(text) > MAX_CHARS:
        raise UnreadableError(f"{len(text)} characters")
    for _ in range(MAX_WRAPPERS):
        match = _WRAPPED.match(text)
        if match is None:
            break
        text = match[2]
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+", lambda m: f"^{{{m[0].translate(_SUPERSCRIPTS)}}}", text)
    text = "".join(_UNICODE.get(char, char) for char in text)
    text = unicodedata.normalize("NFKC", text).replace("**", "^")
    text = _TIMES_X.sub(r"\1*", text)
    text = _HALF_DAY.sub(r"\1m", text)
    text = _GROUP_EXPLICIT.sub("", text)
    text = _DROPPED.sub(" ", text)
    text = _GROUP_SPACE.sub(lambda match: match[0].replace(" ", ""), text.strip())
    return text.strip().rstrip(" .,;")


def join_thousands(text: str) -> str:
    """Drop the commas that group digits in threes, outside brackets only."""
    depth, joined, start = 0, list[str](), 0
    for match in re.finditer(r"[(\[{}\])]", text):
        if depth == 0:
            joined.append(_ungroup(text[start : match.start()]))
            start = match.start()
        depth += 1 if match[0] in "([{" else -1
        depth = max(depth, 0)
        if depth == 0:
            joined.append(text[start : match.end()])
            start = match.end()
    joined.append(text[start:] if depth else _ungroup(text[start:]))
    return "".join(joined)


def lex(text: str) -> list[Token]:
    """Cut normalised text into tokens. Raises UnreadableError at an unknown character."""
    tokens: list[Token] = []
    at = 0
    while at < len(text):
        match = _LEX.match(text, at)
        if match is None:
            raise UnreadableError(f"{text[at]!r} at {at}")
        at = match.end()
        tokens.extend(_tokens_of(match.lastgroup or "", match[match.lastgroup or 0]))
    return tokens


def _ungroup(text: str) -> str:
    return _GROUP_COMMA.sub(lambda match: match[0].replace(",", ""), text)


def _tokens_of(kind: str, text: str) -> list[Token]:
    match kind:
        case "space":
            return []
        case "text":
            return _text(text)
        case "bold":
            return [Token("sym", text)]
        case "domain":
            return [Token("sym", "R" if text == "R" else f"domain {text}")]
        case "science":
            mantissa, exponent = re.split("[eE]", text)
            power = [Token("num", exponent.lstrip("+-"))]
            sign = [Token("op", "-")] if exponent.startswith("-") else []
            parts = [Token("num", mantissa), Token("op", "*"), Token("num", "10")]
            group = [Token("op", "^"), Token("op", "{"), *sign, *power, Token("op", "}")]
            return [*parts, *group]
        case "letters":
            return _letters(text)
        case "cmd":
            name = _ALIAS.get(text, text)
            return [Token("op" if not name.startswith("\\") else "cmd", name)]
        case "op":
            return [Token("op", _ALIAS.get(text, text))]
        case _:
            return [Token(kind, text)]


def _text(text: str) -> list[Token]:
    words = text.strip().lower()
    if words.strip(" ,") in ("and", "or"):
        return [Token("op", words.strip(" ,"))]
    if words in ("%", "percent", "per cent"):
        return [Token("op", "%")]
    if words in SCALES:
        return [Token("num", str(SCALES[words]))]
    if words in _NAMED:
        return [Token("cmd", "\\" + words)]
    if words in ("e", "i"):
        return [Token("sym", words)]
    return [Token("word", words)] if words else []


def _letters(run: str) -> list[Token]:
    lower = run.lower()
    if lower in ("and", "or"):
        return [Token("op", lower)]
    if lower == "percent":
        return [Token("op", "%")]
    if lower in SCALES:
        return [Token("op", "*"), Token("num", str(SCALES[lower]))]
    if run in _PLAIN_NAMES:
        return [Token("cmd", "\\" + _PLAIN_NAMES[run])]
    if len(run) == 1:
        return [Token("sym", run)]
    if len(run) > 3 or lower in _SHORT_WORDS:
        return [Token("word", lower)]
    return [Token("sym", letter) for letter in run]
