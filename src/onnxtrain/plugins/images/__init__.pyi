from .augmentation import CutMix as CutMix
from .augmentation import Flip as Flip
from .augmentation import Mixup as Mixup
from .coco import CocoFile as CocoFile
from .mask_folder import MaskFolder as MaskFolder
from .views import predict_views as predict_views
