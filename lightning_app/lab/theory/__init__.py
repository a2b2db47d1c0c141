"""Theory and figures of papers about models at initialisation, measured on our blocks."""
