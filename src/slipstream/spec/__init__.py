"""Descriptions of models and of their compression: data, without torch. Every other package may
import them."""
