class Unavailable(Exception):
    """This provider has no step for this problem and mode. The message is the reason that the table shows."""
