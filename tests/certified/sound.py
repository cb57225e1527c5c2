"""SOUND: every training that must end certified."""

from __future__ import annotations

from tests.certified import sequences, sound_hub, sound_loops, sound_losses, sound_models
from tests.certified.case import joined

SOUND = joined(sound_models.sound, sequences.sound, sound_hub.sound, sound_losses.sound, sound_loops.sound)
