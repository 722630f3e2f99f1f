"""`fedssl run`: submit runs, follow them, and read what they recorded."""
