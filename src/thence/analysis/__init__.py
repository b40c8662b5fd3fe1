"""Answers: pure functions from tables and places to frozen results. They never print."""
