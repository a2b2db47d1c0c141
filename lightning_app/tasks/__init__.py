"""Training tasks: one module per task. `task_facts.TASKS` lists them."""
