"""Where the memory went: what was live at the peak, by place and kind, and what would make the peak lower."""
