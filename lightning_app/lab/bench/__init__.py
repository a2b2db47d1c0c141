"""Speed comparisons with other libraries."""
