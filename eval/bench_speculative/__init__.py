"""Time per output token of engines whose target model verifies drafts, backend against backend."""
