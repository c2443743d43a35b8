"""A service: a model beside the policy, which answers HTTP requests in the format of vLLM's own server."""
