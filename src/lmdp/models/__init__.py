"""The four models of the paper, with GroupNorm wherever a norm is used, for any input size and number of classes.

registry   models by name, and `module:factory` for a user's own
cnn        the shallow and the deep convolutional network
resnet     ResNet-18
vgg        VGG-16
"""

from lmdp.models.cnn import DCNN, SCNN
from lmdp.models.registry import MODELS, build
from lmdp.models.resnet import ResNet18
from lmdp.models.vgg import VGG16

__all__ = ["DCNN", "MODELS", "SCNN", "VGG16", "ResNet18", "build"]
