"""The four models of the paper, with GroupNorm wherever a norm is used, for any input size and number of classes.

registry   models by name, and `module:factory` for a user's own
cnn        the shallow and the deep convolutional network, S-CNN and D-CNN
resnet     ResNet-18
vgg        VGG-16
running    build a model from a seed, run it in evaluation mode, count what it gets right
"""

from lmdp.models.cnn import DCNN, SCNN
from lmdp.models.registry import MODELS, build
from lmdp.models.resnet import ResNet18
from lmdp.models.running import accuracy, evaluation, fresh
from lmdp.models.vgg import VGG16

__all__ = ["DCNN", "MODELS", "SCNN", "VGG16", "ResNet18", "accuracy", "build", "evaluation", "fresh"]
