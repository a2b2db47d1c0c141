"""What a grid of finished runs says: scores, findings, tables, figures, page and exports."""
