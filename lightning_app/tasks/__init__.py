"""What a model is trained for: one module a task. `task_facts.TASKS` lists them."""
