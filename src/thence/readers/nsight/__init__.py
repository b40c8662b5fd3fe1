"""What Nsight Systems leaves behind: SQLite exports, table folders, CSV reports and ``.nsys-rep``."""
