"""The planner: forest -> leaves in order -> tiles, some of nodes split off -> parts -> words."""
