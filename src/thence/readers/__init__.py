"""One reader per trace format, which turns bytes into tables. A reader knows one format and does no analysis."""
