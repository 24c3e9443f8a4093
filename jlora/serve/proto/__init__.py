"""The gRPC interface: `jlora.proto` and what protoc makes of it (see `generate`)."""
