"""``thence record -- COMMAND``: starts a program so that each of its processes records itself."""
