"""Writers encode results as text, tables and files; analyses compute them."""
