"""Chooses the reader of a prompt's pictures or sounds."""

from __future__ import annotations

from slipstream.config import EngineConfig
from slipstream.engine.audio.sounds import SoundProcessor
from slipstream.engine.vision.pictures import MediaProcessor, PictureProcessor
from slipstream.spec.description import ModelDescription
from slipstream.spec.media.sound import SoundSpec
from slipstream.spec.media.vision import ImageProcessing, VisionSpec


def media_processor(description: ModelDescription, config: EngineConfig) -> MediaProcessor | None:
    """Reader of a prompt's pictures or sounds; None for a model that takes neither."""
    vision, images = description.spec.vision, description.images
    if config.images is None:
        return None
    if isinstance(vision, SoundSpec):
        return SoundProcessor(vision, config.images.max_images)
    if isinstance(vision, VisionSpec) and isinstance(images, ImageProcessing):
        return PictureProcessor(vision, images, config.images.max_images)
    return None
