"""The router's choice for an Envoy that carries the bytes itself (docs/envoy.md)."""
