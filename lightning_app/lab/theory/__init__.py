"""Theory and figures from papers about models at initialisation, measured on our blocks."""
