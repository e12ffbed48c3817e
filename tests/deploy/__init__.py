"""Deployment without Kubernetes: images, compose, Prometheus, Grafana."""
