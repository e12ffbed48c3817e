"""What runs it without Kubernetes: images, compose, Prometheus, Grafana."""
