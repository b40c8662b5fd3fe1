"""``thence record -- COMMAND``: starts a program so that every process of it records itself."""
