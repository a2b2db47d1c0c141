"""Beyond the program itself: speed comparisons with other libraries, and tests of theory."""
