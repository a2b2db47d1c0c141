class RunDisabled:
    """Its name is imported; there is no such run."""
