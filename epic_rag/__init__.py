"""Documents in, answers out: the text side of epic-rag."""
