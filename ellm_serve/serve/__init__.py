"""The HTTP service: vLLM's and OpenAI's wire in front of one engine, on Ray Serve."""
