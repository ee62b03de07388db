"""Bodies of requests and responses: OpenAI's, and what the gateway adds to them."""
