"""What goes wrong on replicas: observations in, findings with a cause and a remedy out."""
