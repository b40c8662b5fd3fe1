"""The report: GPU time by place, the first screen, the headline with its verdict, and the page."""
