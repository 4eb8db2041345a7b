"""An object detector in the style of torchvision's reference scripts."""

import torch
import torchvision
from planted import Slow


def synthetic(count):
    for _ in range(count):
        boxes = torch.tensor([[4.0, 4.0, 40.0, 40.0], [10.0, 20.0, 50.0, 60.0]])
        yield [torch.rand(3, 64, 64)], [{"boxes": boxes, "labels": torch.tensor([1, 2])}]


def train_one_epoch(model, optimizer, loader):
    model.train()
    for images, targets in loader:
        loss_dict = model(images, targets)
        losses = sum(loss for loss in loss_dict.values())
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
        print({name: loss.item().hex() for name, loss in sorted(loss_dict.items())})


def main():
    torch.manual_seed(2)
    backbone = torchvision.models.mobilenet_v2(weights=None).features[:4]
    backbone.out_channels = 24
    anchors = torchvision.models.detection.anchor_utils.AnchorGenerator(((16, 32),), ((1.0,),))
    model = torchvision.models.detection.FasterRCNN(
        backbone,
        num_classes=3,
        rpn_anchor_generator=anchors,
        min_size=64,
        max_size=64,
        rpn_post_nms_top_n_train=20,
        box_detections_per_img=10,
    )
    head = model.roi_heads.box_head
    head.fc7 = torch.nn.Sequential(head.fc7, Slow())
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.005, momentum=0.9, weight_decay=0.0005)
    train_one_epoch(model, optimizer, synthetic(14))


main()
