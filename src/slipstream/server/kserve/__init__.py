"""KServe's v2 protocol, over HTTP and gRPC."""
