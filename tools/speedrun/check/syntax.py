"""Whether a file is Python at all, which needs no import of torch."""

from speedrun.check.screen import Outcome


def check_syntax(source: bytes) -> Outcome:
    """Whether Python would run the file. An import is laxer: it does not decode comments."""
    try:
        source.decode("utf-8")
        compile(source, "train_gpt.py", "exec", dont_inherit=True)
    except UnicodeDecodeError as error:
        line, byte = source.count(b"\n", 0, error.start) + 1, source[error.start]
        return Outcome("syntax", "a Python file", f"line {line}: byte 0x{byte:02x} is not UTF-8",
                       "Save the file as UTF-8: Python and the tools read it so.")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        text = getattr(error, "msg", None) or str(error) or type(error).__name__
        line = getattr(error, "lineno", None)
        return Outcome("syntax", "a Python file", f"line {line}: {text}" if line else text)
    return Outcome("syntax")
