"""Log lines and JSON that quote models and data files hold no character that acts on a terminal."""

from __future__ import annotations

import io
import json
import logging
import sys
import unicodedata

from megatron_dapo.untrusted import PrintableFormatter, printable


def test_every_character_that_unicode_calls_a_control_or_a_format_is_escaped_and_read_back() -> None:
    for code in range(sys.maxunicode + 1):
        character = chr(code)
        shown = printable(character)
        if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") and character not in "\t\n":
            assert shown != character and json.loads(f'"{shown}"') == character
    for character in "\u202a\u202e\u2066\u2069\u200e\u200f\u061c\u200b\u2060\ufeff\U000e0041":
        assert printable(character).isascii() and json.loads(f'"{printable(character)}"') == character
    assert printable("Zeile 1\n\tüber 中文 🙂") == "Zeile 1\n\tüber 中文 🙂"


def test_a_log_line_and_its_traceback_are_printable() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PrintableFormatter("%(message)s"))
    logger = logging.getLogger("printable test")
    logger.addHandler(handler)
    try:
        raise ValueError("prompt \x1b]0;title\x07")
    except ValueError:
        logger.exception("first prompt: %s", "a\x9b2Jb\u202e")
    finally:
        logger.removeHandler(handler)
    assert "\\u009b2Jb\\u202e" in stream.getvalue() and "\\u001b]0;title\\u0007" in stream.getvalue()
    assert not any(c in stream.getvalue() for c in "\x1b\x07\x9b\u202e")
