class Unavailable(Exception):
    """This provider has no step for this problem and mode; the message is the reason, as the table shows it."""
