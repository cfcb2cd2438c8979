"""The rollout server: HTTP and gRPC around one engine."""
