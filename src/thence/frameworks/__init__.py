"""What thence adds to frameworks; each module needs its framework only when it is used."""
