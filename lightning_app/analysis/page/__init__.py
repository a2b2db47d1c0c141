"""The page of a report: one HTML file, section by section, that needs no network."""
