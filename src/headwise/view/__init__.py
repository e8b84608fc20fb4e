"""The page: one self-contained HTML file that shows every head and works offline."""
