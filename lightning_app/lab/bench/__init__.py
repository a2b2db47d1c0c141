"""Speed against other libraries."""
