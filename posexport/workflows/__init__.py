"""Many artifacts at once: a project's files (`project`) and jobs on many machines (`sweep`)."""
