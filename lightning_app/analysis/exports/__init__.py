"""What a report leaves for other programs and for a paper: tables and references."""
