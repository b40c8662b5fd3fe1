"""Readers of Nsight Systems files: SQLite exports, table folders, CSV reports and ``.nsys-rep`` reports."""
