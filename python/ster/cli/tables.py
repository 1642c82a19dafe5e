"""Plain tables and bars for a terminal: they make sense without colour and can be pasted into a mail."""

from __future__ import annotations

from collections.abc import Sequence

EIGHTHS = " ▏▎▍▌▋▊▉█"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns two spaces apart; numbers and what starts like one to the right, text to the left.

    >>> print(table(["layer", "what"], [["3", "a"], ["12", "b"]]))
    layer  what
        3  a
       12  b
    """
    columns = list(zip(*rows, strict=True)) if rows else [() for _ in headers]
    right = [all(cell[:1].isdigit() or cell[:1] in "-+" for cell in column if cell) and bool(rows) for column in columns]
    widths = [max(len(head), *map(len, column), 0) for head, column in zip(headers, columns, strict=True)]
    lines = []
    for row in (headers, *rows):
        cells = [cell.rjust(width) if flush else cell.ljust(width) for cell, width, flush in zip(row, widths, right, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def bar(value: float, top: float, width: int = 20) -> str:
    """`value` as a bar of at most `width` characters, which stands for `top`; nothing for 0 and below.

    >>> bar(1.0, 2.0, 4), bar(-1.0, 2.0)
    ('██', '')
    """
    eighths = round(8 * width * min(max(value / top, 0.0), 1.0)) if top > 0.0 else 0
    return ("█" * (eighths // 8) + EIGHTHS[eighths % 8]).rstrip()


def number(value: float | None, digits: int = 3) -> str:
    """Three digits after the point; a dash for what is not known.

    >>> number(0.5), number(None), number(1234567.0), number(0.00012)
    ('0.500', '-', '1.23e+06', '1.2e-04')
    """
    if value is None:
        return "-"
    if value != 0.0 and not 10.0**-digits <= abs(value) < 1e5:
        return f"{value:.{digits - 1 if abs(value) >= 1.0 else 1}e}"
    return f"{value:.{digits}f}"


def interval(bounds: tuple[float, float] | None, digits: int = 2) -> str:
    """
    >>> interval((0.25, 1.0))
    '0.25 to 1.00'
    """
    return "" if bounds is None else f"{bounds[0]:.{digits}f} to {bounds[1]:.{digits}f}"


def spans(numbers: Sequence[int]) -> str:
    """
    >>> spans([0, 1, 2, 3, 7])
    '0 to 3, 7'
    """
    from ster.workflow import spans as worded

    return worded(numbers)


def count(number: int, noun: str) -> str:
    """
    >>> count(1, "pair"), count(2, "pair")
    ('1 pair', '2 pairs')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
