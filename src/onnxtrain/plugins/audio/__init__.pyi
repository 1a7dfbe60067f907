from .sounds import SoundFolder as SoundFolder
