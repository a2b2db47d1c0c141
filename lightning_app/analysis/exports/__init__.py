"""The files of a report for other programs and for a paper: tables and references."""
