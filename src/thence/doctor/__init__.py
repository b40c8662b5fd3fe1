"""``thence doctor``: checks of what thence can do on this machine."""
