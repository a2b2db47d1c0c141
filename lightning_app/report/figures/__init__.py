"""The figures of a report: `write.write_figures` draws them, one module for each question."""
