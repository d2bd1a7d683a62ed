"""What files say about themselves, as it may stand in an error message."""


def shown(value: object, limit: int = 200) -> str:
    """A stranger's text on one line: control characters escaped, so that it can't write over the
    terminal that shows the error, and cut off after `limit` characters."""
    text = str(value)
    clean = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:limit])
    return clean if len(text) <= limit else clean + "…"
